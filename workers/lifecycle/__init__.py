"""What every actor needs: its service for a store, its tasks, its progress, its share of failures."""
