"""What the process of every actor needs: its service for a store, tasks, files, and facts of its machine."""
