"""Evaluation of drafters and methods: acceptance, speed, output quality."""
