"""The service a hospital runs: images over HTTP or from a watched folder, one merged model, an audit trail."""
