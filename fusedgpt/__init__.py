"""Everything that the scripts beside this folder share; each file has one job."""
