"""The paths of the server: each is a function from an `Exchange` to a response."""
