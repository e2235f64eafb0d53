"""The members of a run: how they are watched, replaced, added and removed, and taken over by another command.

liveness          finds members that hang            members, nodes, scaling   who joins and leaves
supervisor        keeps members serving              recovery, recoveries      what is to be done about a loss: pure
trainer_recovery  brings all ranks back              restarts                  owns what these three have under way
store_recovery    brings the store back              handover, takeover        what outlives the command
"""
