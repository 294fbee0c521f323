"""kill -9, loop after loop: writers of fingerprint pages are killed at random instants, and what they leave is proven.

    make crash LOOPS=1000

One process imports everything and never makes a thread; each writer and each heir is a fork of it, so that a loop takes a fraction
of a second.
"""
