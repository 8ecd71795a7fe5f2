"""Shipped data: recipes, the deployment file, constraints."""
