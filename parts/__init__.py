"""What the scripts are built from: one job a file. Nothing here imports model.py; models arrive as arguments."""
