"""What the Tinker SDK sends and reads, and plain data: requests are decoded here, results encoded. Pure."""
