"""How a failure is recorded, reported and explained."""
