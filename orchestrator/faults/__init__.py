"""What becomes of a run whose members die or hang: who is lost, and whether to restart, to return or to end."""
