"""The experiments of bench.py: each kind has `plan`, its rows in order, and `measure`, what one row is."""
