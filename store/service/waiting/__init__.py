"""Who waits for what in the store, who is next, and how much it gets: nobody polls."""
