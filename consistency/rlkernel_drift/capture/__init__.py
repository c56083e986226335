"""Capture: capsules from engines. Each adapter is a file that imports its engine when it is called, never before."""
