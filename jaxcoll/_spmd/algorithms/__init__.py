"""All-reduce algorithms, one short file each, and the table that knows them all."""
