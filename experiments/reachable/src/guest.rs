//! What the guest does: it serves a page and a large file with nginx and an application with Tomcat, and has an SSH server. It is the
//! same for both systems.

/// The guest writes this to its serial console when its servers answer.
pub const READY: &str = "perigee-reachable: ready";

pub const PAGE: &str = "page";
pub const LARGE: &str = "large";
pub const LARGE_BYTES: u64 = 1 << 30;
pub const HTTP_PORT: u16 = 80;
pub const SSH_PORT: u16 = 22;
pub const TOMCAT_PORT: u16 = 8080;
pub const MEMORY_BYTES: u64 = 512 << 20;

/// A page of a shop: it sorts a catalogue, and puts an item into the cart of a session.
const APPLICATION: &str = r#"<%@ page contentType="text/plain" import="java.util.*" %><%
List<Map.Entry<String, Long>> items = new ArrayList<>();
long price = 4711;
for (int n = 0; n < 300; n++) {
  price = (price * 1103515245L + 12345) % 2147483648L;
  items.add(new AbstractMap.SimpleEntry<>("item" + n, price));
}
items.sort(Map.Entry.comparingByValue());
List<String> cart = (List<String>) session.getAttribute("cart");
if (cart == null) session.setAttribute("cart", cart = new ArrayList<>());
cart.add(items.get(0).getKey());
for (Map.Entry<String, Long> item : items.subList(0, 20)) out.println(item.getKey() + " " + item.getValue());
out.println("in the cart: " + cart.size());
%>"#;

const SERVER: &str = r#"<Server port="-1"><Service name="Catalina"><Connector port="8080" maxThreads="20"/><Engine name="Catalina" defaultHost="localhost">
<Host name="localhost" appBase="webapps" autoDeploy="false"/></Engine></Service></Server>"#;

/// `key`: the public key that may log in as root.
pub fn command(key: &str) -> Vec<String> {
    let script = format!(
        "set -e
mkdir -p /root/.ssh /run/sshd /srv/www; chmod 700 /root/.ssh
echo '{key}' > /root/.ssh/authorized_keys
head -c 1024 /dev/urandom > /srv/www/{PAGE}
truncate -s {LARGE_BYTES} /srv/www/{LARGE}
cat > /tmp/nginx.conf <<'END'
worker_processes 1;
error_log /dev/null;
pid /tmp/nginx.pid;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; default_type application/octet-stream;
  client_body_temp_path /tmp/body; proxy_temp_path /tmp/proxy;
  server {{ listen {HTTP_PORT}; root /srv/www; }}
}}
END
ssh-keygen -A
/usr/sbin/sshd -o PermitRootLogin=yes -o UsePAM=no
/usr/sbin/nginx -c /tmp/nginx.conf
home=/usr/share/tomcat10 base=/srv/tomcat
mkdir -p $base/conf $base/logs $base/temp $base/work $base/webapps/ROOT
cp /etc/tomcat10/web.xml $base/conf/
cat > $base/conf/server.xml <<'END'
{SERVER}
END
cat > $base/webapps/ROOT/index.jsp <<'END'
{APPLICATION}
END
cd $base
java -Xmx128m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto -Djava.security.egd=file:/dev/urandom -Dcatalina.home=$home \
  -Dcatalina.base=$base -Djava.io.tmpdir=$base/temp -Dtomcat.util.scan.StandardJarScanFilter.jarsToSkip='*.jar' \
  -cp $home/bin/bootstrap.jar:$home/bin/tomcat-juli.jar org.apache.catalina.startup.Bootstrap start >$base/logs/out 2>&1 &
java=$!
tries=0
cat > /tmp/ask <<'END'
exec 3<>/dev/tcp/127.0.0.1/{TOMCAT_PORT}
printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3
read -t 60 -r line <&3
[[ $line == *200* ]]
END
until bash /tmp/ask 2>/dev/null; do
  tries=$((tries + 1))
  # The rest is measured without it.
  if ! kill -0 $java || [ $tries -gt 150 ]; then tail -n 20 $base/logs/out > /dev/console; break; fi
  sleep 1
done
echo '{READY}' > /dev/console
exec sleep 1000000
"
    );
    vec!["/bin/sh".to_owned(), "-c".to_owned(), script]
}
