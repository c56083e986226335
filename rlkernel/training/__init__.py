"""The trainers: settings, batches, the GRPO and SFT steps, the bitwise check, the run folder and its report."""
