"""What `kvstrata bench` measures: our figure beside the physical limit, taken in turns in the same run, and their ratio.

Speed is measured here and asserted nowhere: machines differ and are shared. Data is checked after each timing.
"""
