"""Where actors go: which there are, what each reserves, on which node each is, and one reservation for all of them."""
