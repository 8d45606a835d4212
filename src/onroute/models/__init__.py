"""Loading, sharding and naming stock Hugging Face models."""
