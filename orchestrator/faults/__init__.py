"""Recovery of a run whose members die or hang: which one is lost, and whether to restart, to return or to end."""
