"""Who owns the actors of a run, in Ray's sense: they end with it. A process of a run, or an actor that outlives it."""
