"""Language models as trainers call them: log-probabilities of given tokens, or one number for an output."""
