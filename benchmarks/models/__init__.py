"""What is predicted and not measured."""
