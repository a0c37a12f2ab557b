"""From prompts to graded samples: data source, generation, rewards, filters."""
