"""From words, recipes and user files to one `RunConfig`, of which all has been checked that can be beforehand."""
