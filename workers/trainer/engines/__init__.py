"""The engines that hold the sharded model and step its optimizer: FSDP2 or DeepSpeed, and what changes its layers."""
