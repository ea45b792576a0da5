"""``specgym bench peers``: our engine against transformers, vLLM and llama.cpp."""
