"""Plans of a run before it starts: what each way to split a cluster costs, and a simulator of the run itself."""
