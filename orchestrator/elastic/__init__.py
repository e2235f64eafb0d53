"""A run that gets more members and fewer while it goes on: engines and rewards (`docs/elastic.md`)."""
