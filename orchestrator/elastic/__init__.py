"""Adding and removing members of a run while it goes on: engines and rewards (`docs/elastic.md`)."""
