"""How a command goes on with the actors of one that has died: nothing is started again, and no step is lost."""
