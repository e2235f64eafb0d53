"""Makes one `RunConfig` of words, recipes and user files, and checks all that can be checked beforehand."""
