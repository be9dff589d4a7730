-- Forwards every new image to mergestream. What comes back from it, and objects without pixels, are not forwarded:
-- otherwise each report would be sent in a circle.
local DESTINATION, ITS_TITLE = 'mergestream', 'MERGESTREAM'
local NOT_IMAGES = {SR = true, DOC = true, PR = true, KO = true, SEG = true, RTSTRUCT = true, RTPLAN = true, RTDOSE = true}

function OnStoredInstance(instanceId, tags, metadata, origin)
   if origin['RemoteAet'] ~= ITS_TITLE and not NOT_IMAGES[tags['Modality'] or ''] then
      local job = {Resources = {instanceId}, Asynchronous = true}
      RestApiPost('/modalities/' .. DESTINATION .. '/store', DumpJson(job, true))
   end
end

-- Jobs that failed, because the service was away for instance, are tried again as soon as another one succeeds, and
-- by newer versions of Orthanc every ten seconds.
local failed = {}

local function try_again()
   local waiting = failed
   failed = {}
   for jobId, _ in pairs(waiting) do
      RestApiPost('/jobs/' .. jobId .. '/resubmit', '')
   end
end

function OnJobFailure(jobId)
   failed[jobId] = true
end

function OnJobSuccess(jobId)
   try_again()
end

function OnHeartBeat()
   try_again()
end
