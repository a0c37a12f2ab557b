"""Tests of users' functions."""
