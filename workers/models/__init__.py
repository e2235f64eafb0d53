"""Facts and files of a model's directory, read without building the model."""
