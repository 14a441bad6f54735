"""Self-distillation and head training."""
