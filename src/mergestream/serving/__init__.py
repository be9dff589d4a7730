"""The service a hospital runs: images in over HTTP or a watched folder, one merged model, an audit trail."""
