"""What works in the processes that are measured: numpy only, but for each rank's own library.

Nothing here imports the rest of jaxcoll, except the rank that measures it: the other libraries'
interpreters may have no JAX.
"""
