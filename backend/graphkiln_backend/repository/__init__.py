"""Model repositories: layout, versions, config.pbtxt, signatures, remote stores."""
