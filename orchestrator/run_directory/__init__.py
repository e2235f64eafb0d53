"""The directory of a run: its files of lines, its lock, its copy in an object store, the manifest of a checkpoint."""
