"""Files that a run leaves on disk: its directory and lock, files of lines, the timeline."""
