"""Backbones and Medusa heads."""
