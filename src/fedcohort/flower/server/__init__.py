"""What runs at the server: who is there, what they are asked, who trains, and what came back."""
