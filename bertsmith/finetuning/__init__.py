"""Fine-tuning: labelled rows and a model to a model with a head."""
