"""Everything that the scripts train.py, sample.py, bench.py, export.py, harness.py and plot.py share; each file has one job."""
