"""What goes into a run: prompts, tokenizers, rewards and the built-in tasks. Reads no engine, no model, no trainer."""
