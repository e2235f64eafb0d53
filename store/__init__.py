"""The streaming store, in four packages that import one another downwards:

client/    how workers speak to it
service/   the process that answers them
data/      the values, and where they lie
ledger/    every decision, without a clock, a value or a wait
"""
