"""All-reduce algorithms, one short file each, and the table of all of them."""
