"""What is read of run directories, whoever is writing them meanwhile."""
