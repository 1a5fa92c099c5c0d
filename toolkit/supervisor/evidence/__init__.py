"""What an attempt leaves behind, read: outcome.json, torchrun's reports, errors of ranks."""
