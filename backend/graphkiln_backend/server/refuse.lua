-- Refuse a request over HTTP: read all of it first, because closing a connection with unread bytes would reset it.
core.register_service("refuse", "http", function(applet)
    local status, reason = string.match(applet:get_var("txn.refusal"), "(%d+) (.*)")
    repeat
        local part = applet:receive(65536)
    until part == nil or part == ""
    local body = '{"error": "' .. reason .. '"}'
    applet:set_status(tonumber(status))
    applet:add_header("content-type", "application/json")
    applet:add_header("content-length", tostring(#body))
    if status == "503" or status == "429" then
        applet:add_header("retry-after", "1")
    end
    if status == "503" then
        applet:add_header("connection", "close")
    end
    applet:start_response()
    applet:send(body)
end)
