"""Who holds the sharded model and steps its optimizer: FSDP2 or DeepSpeed, and what changes its layers."""
