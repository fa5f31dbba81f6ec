"""dealing: units of rows, read by Ray tasks on any node and dealt to the workers that train. Needs no torch."""
