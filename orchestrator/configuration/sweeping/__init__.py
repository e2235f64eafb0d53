"""Many runs of one command: `penstock sweep`."""
